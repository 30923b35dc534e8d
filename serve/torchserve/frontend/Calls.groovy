import groovy.transform.CompileDynamic
import groovy.transform.CompileStatic
import com.google.protobuf.MessageLite
import io.grpc.ForwardingServerCall
import io.grpc.ForwardingServerCallListener
import io.grpc.Metadata
import io.grpc.Server
import io.grpc.ServerCall
import io.grpc.ServerCallHandler
import io.grpc.ServerInterceptor
import io.grpc.ServerInterceptors
import io.grpc.Status
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder
import java.util.concurrent.TimeUnit
import org.pytorch.serve.ModelServer
import org.pytorch.serve.grpcimpl.GRPCInterceptor
import org.pytorch.serve.grpcimpl.GRPCServiceFactory
import org.pytorch.serve.util.ConfigManager
import org.pytorch.serve.util.ConnectorType

/** Counts the messages of gRPC calls as `Gate` counts bodies; a message is known when it has arrived, not before. */
@CompileStatic
class Calls implements ServerInterceptor {
    private static final int MOST_AT_ONCE = 64  // calls of one connection

    private final Admission admission

    Calls(Admission admission) {
        this.admission = admission
    }

    /** Start TorchServe's gRPC servers, as its private startGRPCServer would, with these before its services. */
    @CompileDynamic
    static void start(ModelServer server, Admission admission) {
        server.@inferencegRPCServer = listen(ConnectorType.INFERENCE_CONNECTOR, admission)
        server.@managementgRPCServer = listen(ConnectorType.MANAGEMENT_CONNECTOR, admission)
    }

    private static Server listen(ConnectorType type, Admission admission) {
        ConfigManager config = ConfigManager.getInstance()
        return NettyServerBuilder
                .forAddress(new InetSocketAddress(config.getGRPCAddress(type), config.getGRPCPort(type)))
                .maxConnectionAge(config.getGRPCMaxConnectionAge(type), TimeUnit.MILLISECONDS)
                .maxConnectionAgeGrace(config.getGRPCMaxConnectionAgeGrace(type), TimeUnit.MILLISECONDS)
                .maxConcurrentCallsPerConnection(MOST_AT_ONCE)
                .maxInboundMessageSize(config.getMaxRequestSize())
                // The last is asked first: who has no token is refused before.
                .addService(ServerInterceptors.intercept(
                        GRPCServiceFactory.getgRPCService(type), new Calls(admission), new GRPCInterceptor(type)))
                .build()
                .start()
    }

    @Override
    <Q, A> ServerCall.Listener<Q> interceptCall(ServerCall<Q, A> call, Metadata headers, ServerCallHandler<Q, A> next) {
        Counted<Q, A> counted = new Counted<Q, A>(call, admission)
        return new Listening<Q>(next.startCall(counted, headers), counted)
    }

    private static class Counted<Q, A> extends ForwardingServerCall.SimpleForwardingServerCall<Q, A> {
        private final Admission admission
        private long bytes = 0
        private boolean refused = false

        Counted(ServerCall<Q, A> call, Admission admission) {
            super(call)
            this.admission = admission
        }

        synchronized boolean take(Object message) {
            long size = message instanceof MessageLite ? ((MessageLite) message).getSerializedSize() : 0
            if (!refused && admission.take(size)) {
                bytes += size
                return true
            }
            if (!refused) {
                refused = true
                close(Status.RESOURCE_EXHAUSTED.withDescription(Answers.NO_ROOM), new Metadata())
            }
            return false
        }

        synchronized void abandon() {
            admission.abandon(bytes)
            bytes = 0
        }

        @Override
        void close(Status status, Metadata trailers) {
            synchronized (this) {
                admission.give(bytes)
                bytes = 0
            }
            super.close(status, trailers)
        }
    }

    private static class Listening<Q> extends ForwardingServerCallListener.SimpleForwardingServerCallListener<Q> {
        private final Counted<Q, ?> call
        private boolean refused = false

        Listening(ServerCall.Listener<Q> listener, Counted<Q, ?> call) {
            super(listener)
            this.call = call
        }

        @Override
        void onMessage(Q message) {
            refused = !call.take(message)
            if (!refused) {
                super.onMessage(message)
            }
        }

        @Override
        void onHalfClose() {
            if (!refused) {
                super.onHalfClose()
            }
        }

        @Override
        void onCancel() {
            call.abandon()
            super.onCancel()
        }
    }
}
